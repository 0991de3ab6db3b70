"""Transfer engines behind one contract; each adapter is imported only when it is asked for."""
