"""The ragged cache in memory, its ranking, its manifest and its bytes on the wire."""
