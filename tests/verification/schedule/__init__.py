"""Kills or freezes the leader of a schedule around due times, and accounts for every due time.

    make kills KILLS=200                       two seconds a kill
    make kills KILLS=20 ARGS=--freeze          the leader is frozen instead

``kills`` says what must hold. ``beside`` runs a schedule beside the torture. A few kills are among the long tests.
"""
