"""Clusters from files of other software: each reader gives `FileFacts`, which `joined_cluster` turns into one
cluster file. docs/how-to/import-a-cluster.md has the formats."""
