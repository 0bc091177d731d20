"""The interface for asyncio and trio. The engine runs in its own threads, as for blocking code."""
