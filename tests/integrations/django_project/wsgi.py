"""What a server imports: here the node of a process that serves is started."""

from django.core.wsgi import get_wsgi_application

from tenure.integrations.django import start

application = get_wsgi_application()
start()
