"""An app with singleton work."""
