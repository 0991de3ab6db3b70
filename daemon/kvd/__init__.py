"""Everything behind the command line: geometry, topology, wire, backends, daemon, connector."""
