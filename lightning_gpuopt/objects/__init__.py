"""One walk over users' objects, and what it shows: changed state, containers that grow, objects that are copied."""
