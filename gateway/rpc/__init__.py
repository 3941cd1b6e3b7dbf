"""The Open Inference Protocol over gRPC. Imported only where a gRPC port is served: grpcio and protobuf are an extra."""
