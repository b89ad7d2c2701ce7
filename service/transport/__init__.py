"""gRPC: sockets, admission, health, reflection, and errors as status codes. Nothing else imports grpc."""
