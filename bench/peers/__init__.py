"""Other systems, as benches run them. Some modules run under an interpreter of the peer's own."""
