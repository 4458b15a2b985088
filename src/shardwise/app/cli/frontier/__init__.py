"""The command `frontier`: Pareto frontiers of step time and memory as tables, JSON, plan files and a plot."""
