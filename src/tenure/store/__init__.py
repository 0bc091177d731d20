"""The SQL, written once for all databases and without a driver.

``statements`` has every statement that decides who leads, and ``dialects`` the words in which databases differ.
``control`` and ``watch`` run the statements for the two lanes of a node, on a ``session`` that a database provides.
``tables`` and ``migrations`` create the tables. ``records`` reads the tables for operators.
"""
