"""SQLite, through the standard library: the default, for processes on one machine.

One writer at a time holds the whole file, in short ``BEGIN IMMEDIATE`` transactions. There is no server that could
notify a node, so the watcher checks the sentinels and the file's change counter many times a second.

``session.py`` runs transactions and handles forks, ``connect.py`` opens the file, ``sentinel.py`` has the locks that
end when a process dies, ``file_use.py`` keeps nodes on two files of one name from leading at the same time.
"""
