"""gRPC: sockets, admission, health, reflection and the mapping of errors to status codes. Nothing else imports grpc."""
