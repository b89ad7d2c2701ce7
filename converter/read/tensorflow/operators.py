"""The TensorFlow operators that a model may run, and the reasons for rejecting others.

TensorFlow has some 1,500 operators, and more with each release. Some open files, run Python or reach other machines. So
these are lists of what is allowed. docs/decisions/0066-tensorflow-apart.md has the reasons.
"""

from __future__ import annotations


def _name_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Needed to restore stored variables into a graph; writes nothing but variables and tables in memory.
RESTORING = _name_set(
    """
    Assign AssignVariableOp Cast Const HashTableV2 Identity IdentityN LookupTableImportV2 MutableHashTableV2 NoOp Pack
    PartitionedCall Placeholder PlaceholderWithDefault ReadVariableOp Reshape RestoreV2 ShardedFilename Split
    StatefulPartitionedCall StatelessRandomUniformV2 Unpack VarHandleOp Variable VariableV2
    """
)

# Operators that only compute numbers from numbers, and those that carry values, variables and calls around them. They
# are all that tf2onnx 1.17 translates, and some that it recognises but does not translate.
COMPUTING = _name_set(
    """
    Abs Acos Acosh Add AddN AddV2 AdjustContrastv2 AdjustHue AdjustSaturation All Any ArgMax ArgMin Asin Asinh Assert
    Atan Atan2 Atanh AvgPool AvgPool3D BatchMatMul BatchMatMulV2 BatchMatMulV3 BatchToSpaceND BiasAdd BiasAddV1
    Bincount Bitcast BitwiseAnd BitwiseOr BitwiseXor BroadcastArgs BroadcastTo Bucketize CTCGreedyDecoder Cast Ceil
    CheckNumerics ClipByValue CombinedNonMaxSuppression ComplexAbs Concat ConcatV2 Const ConstV2 Conv1D Conv2D
    Conv2DBackpropInput Conv3D Conv3DBackpropInputV2 Cos Cosh CropAndResize CudnnRNN Cumprod Cumsum DenseBincount
    DenseToDenseSetOperation DepthToSpace DepthwiseConv2d DepthwiseConv2dNative Diag DiagPart Div DivNoNan Dropout
    DynamicPartition DynamicStitch Einsum Elu EnsureShape Enter Equal Erf Erfc Exit Exp ExpandDims Expm1
    ExtractImagePatches FFT FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars Fill Flatten Floor FloorDiv FloorMod
    FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 Gather GatherNd GatherV2 Greater GreaterEqual HardSwish Identity
    IdentityN If Invert InvertPermutation IsFinite IsInf IsNan L2Loss L2Normalization LRN LSTMBlockCell LeakyRelu
    LeftShift Less LessEqual LinSpace Log Log1p LogSoftmax LogicalAnd LogicalNot LogicalOr LoopCond MatMul
    MatrixBandPart MatrixDeterminant MatrixDiag MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixDiagV2
    MatrixDiagV3 MatrixInverse MatrixSetDiagV3 Max MaxPool MaxPool3D MaxPoolV2 MaxPoolWithArgmax Maximum Mean Merge Min
    Minimum MirrorPad Mod Mul MulNoNan Multinomial Neg NextIteration NoOp NonMaxSuppressionV2 NonMaxSuppressionV3
    NonMaxSuppressionV4 NonMaxSuppressionV5 NotEqual OneHot OnesLike Pack Pad PadV2 ParallelDynamicStitch
    PartitionedCall Placeholder PlaceholderV2 PlaceholderWithDefault Pow Prelu PreventGradient Prod RFFT RFFT2D
    RaggedGather RaggedRange RandomNormal RandomNormalLike RandomShuffle RandomStandardNormal RandomUniform
    RandomUniformInt RandomUniformLike Range Rank ReadVariableOp RealDiv Reciprocal Relu Relu6 Reshape ResizeArea
    ResizeBicubic ResizeBilinear ResizeNearestNeighbor ResourceGather ReverseSequence ReverseV2 RightShift Rint Roll
    Round Rsqrt ScatterNd SegmentMax SegmentMean SegmentMin SegmentProd SegmentSum Select SelectV2 Selu Shape ShapeN
    Sigmoid Sign Sin Sinh Size Slice Snapshot Softmax SoftmaxCrossEntropyWithLogits Softplus Softsign SpaceToBatchND
    SpaceToDepth SparseFillEmptyRows SparseReshape SparseSegmentMean SparseSegmentMeanWithNumSegments
    SparseSegmentSqrtN SparseSegmentSqrtNWithNumSegments SparseSegmentSum SparseSegmentSumWithNumSegments
    SparseSoftmaxCrossEntropyWithLogits SparseToDense Split SplitV Sqrt Square SquaredDifference SquaredDistance
    Squeeze StatefulPartitionedCall StatelessIf StatelessWhile StopGradient StridedSlice Sub Sum Switch Tan Tanh
    TensorArrayGatherV3 TensorArrayReadV3 TensorArrayScatterV3 TensorArraySizeV3 TensorArrayV3 TensorArrayWriteV3
    TensorListFromTensor TensorListGetItem TensorListLength TensorListReserve TensorListResize TensorListSetItem
    TensorListStack TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate Tile TopKV2
    Transpose TruncateDiv TruncateMod Unique UniqueWithCounts Unpack UnsortedSegmentMax UnsortedSegmentMin
    UnsortedSegmentProd UnsortedSegmentSum VarHandleOp VarIsInitializedOp Variable VariableV2 Where While Xdivy Xlogy
    ZerosLike
    """
)

_CODE = ("it runs Python code, which is not in the model", "leave that step out of the model that you export")
_FILES = ("it opens files", "leave that step out of the model that you export")
_TABLE = ("a table of words or numbers, which stays in the client", "export a model that takes the numbers")
_STRING = ("it works on strings, which stay in the client", "export a model that takes numbers")
_WRITES = ("it changes a variable, and an artifact's weights never change", "export the model for inference")
_PRINTS = ("it prints", "leave it out of the model that you export")
_UNKNOWN = (
    "ONNX has no counterpart that tf2onnx translates it to",
    "write that step with other operators, or leave it out of the model that you export",
)
_REASONS = (
    (("PyFunc", "NumpyFunction"), _CODE),
    (
        ("ReadFile", "WriteFile", "MatchingFiles", "Save", "Restore", "Reader", "Dataset", "Filename", "Checkpoint"),
        _FILES,
    ),
    (("Table",), _TABLE),
    (("String", "Regex", "Unicode", "Wordpiece", "Sentencepiece", "DecodeJpeg", "DecodeRaw", "ParseExample"), _STRING),
    (("Assign", "ScatterUpdate", "ScatterAdd", "Apply"), _WRITES),
    (("Print",), _PRINTS),
)


def refusal(op: str) -> tuple[str, str]:
    """Return why ``op`` is rejected, and the remedy."""
    return next((reason for parts, reason in _REASONS if any(part in op for part in parts)), _UNKNOWN)
