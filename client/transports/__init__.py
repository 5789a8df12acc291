"""Other ways of the SDK to the service: one WebSocket, and OpenAI's own client."""
