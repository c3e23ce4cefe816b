"""A node as a pod of Kubernetes: what it tells the API server of itself. Optional."""
