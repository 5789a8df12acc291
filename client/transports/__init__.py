"""Another way of the SDK to the service: the connections of OpenAI's own client."""
