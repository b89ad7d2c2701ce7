# Sourced by versions.sh and in_onnxruntime.sh: the tests that run the operators in ONNX Runtime.
operators=(tests/kit/runtime/test_{kernel_graphs,kernel_refusals,attention,norm,conv,recurrent}.py tests/converter/fuse/test_{panels,join,convolve}.py)
