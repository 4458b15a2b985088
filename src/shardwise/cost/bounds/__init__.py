"""Lower bounds of the step time and the memory of all strategies of a subproblem."""
