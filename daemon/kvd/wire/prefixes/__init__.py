"""Messages on prefixes beside the reads (`kvd.wire.prefix`): hints on who holds them, and what operators ask."""
