"""Serving: slots and continuous batching, cost-aware scheduling, an HTTP server."""
