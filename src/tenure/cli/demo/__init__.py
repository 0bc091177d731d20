"""``tenure demo``: an election, a crash and a takeover to watch."""
