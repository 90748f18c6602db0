"""The cache store: a gRPC server in front of Redis. Imports no torch."""
