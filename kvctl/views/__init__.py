"""The documents that kvctl prints: their fields, units and schemas, and how each looks at a terminal."""
