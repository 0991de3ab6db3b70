"""The worker's and the operator's side of the wire."""
