"""The specification of ``tenure.core`` by examples, without any server."""
