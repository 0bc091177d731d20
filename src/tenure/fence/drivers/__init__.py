"""One module per driver. Each lists in ``KINDS`` the classes of connections that it has an adapter for."""
