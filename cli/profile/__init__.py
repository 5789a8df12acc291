"""`mallee profile`: times the steps of a real engine, as a timing for the mocker or as a browser's trace."""
