"""The study: what a projection adds to replay, and what it costs."""
