"""One page: which process serves, and whether it leads."""

import os

from django.http import HttpRequest, JsonResponse
from django.urls import path

from tenure.integrations.django import get_node


def leader(_: HttpRequest) -> JsonResponse:
    node = get_node()
    return JsonResponse({"pid": os.getpid(), "name": node.name, "leads": node.election("scheduler").is_leader})


urlpatterns = [path("leader", leader)]
