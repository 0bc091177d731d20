"""``tenure cron``: a crontab that several machines share, and that runs on one of them at a time."""
