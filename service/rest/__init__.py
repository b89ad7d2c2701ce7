"""The protocol's REST form, on the HTTP port: the requests, limits and errors of the gRPC port, in JSON and binary."""
