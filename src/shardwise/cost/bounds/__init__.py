"""Lower bounds on the step time and the memory of all strategies of a subproblem."""
