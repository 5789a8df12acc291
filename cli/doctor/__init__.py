"""`mallee doctor` and `doctor-model`: a look at a machine, and a model's numbers beside transformers'."""
