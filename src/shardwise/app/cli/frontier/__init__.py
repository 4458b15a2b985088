"""The command `frontier`: curves of time against memory, as tables, a document, plan files and a plot."""
