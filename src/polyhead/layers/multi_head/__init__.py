"""Multi-head, multi-query and grouped-query attention."""
