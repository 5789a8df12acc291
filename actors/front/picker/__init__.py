"""The gRPC service that picks pods for Envoy: an endpoint picker of the Gateway API's inference extension."""
