"""Branch and bound over uniform strategies: nodes, bounds, pruning, incumbents and the ledger of outcomes."""
