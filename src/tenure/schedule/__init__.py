"""A schedule: jobs that run once at each due time, whichever node leads.

A schedule is a service of the leader, with a list of jobs. Four ideas carry it:

- The database's clock decides when a run is due. Each renewal brings it along, and the claim of a run checks it again.
- A run is claimed in a fenced transaction before it begins. No other node can claim it again, and a node whose term is
  over cannot claim anything.
- The claim moves a mark in the job's row. All due times up to the mark are accounted for: each has a row in the table
  of runs, or is part of a stretch that was skipped, with the reason and the number of due times. The rows are written
  in the transaction of the claim.
- A new leader continues at the mark. What fell due while no node led is made up for as the job's options say.

    due_times   when a job is due: cron expressions and intervals       (pure)
    durations   "5 min"                                                 (pure)
    jobs        the options of a job, and their checks                  (pure)
    plan        what to run now, and what to skip                       (pure)
    run         one run: its transaction, and how it is recorded
    claims      what is written about definitions, claims and skipped due times
    scheduler   the jobs of one term: waits, starts runs, stops them
    schedule    Schedule, which the application fills with jobs
"""
