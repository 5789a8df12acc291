"""`mallee metrics`: what is made from the catalog of metrics."""
