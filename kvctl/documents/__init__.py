"""The documents that kvctl prints as JSON and YAML: their fields, units and schemas. Pure: no sockets, no screen."""
