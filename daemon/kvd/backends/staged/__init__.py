"""The backend `staged`: peers read copies in host memory instead of the KV memory itself."""
