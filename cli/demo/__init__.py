"""The command `mallee demo`: five questions on one document, by forks and plainly."""
