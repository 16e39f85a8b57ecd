# What a torch tensor is, in one C call: torch's own function of DLPack (``__dlpack_c_exchange_api__``, torch 2.10).

from cpython.exc cimport PyErr_Clear
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport uint8_t, uint16_t

cdef enum:
    DLPACK_MAJOR = 1
    DLPACK_INT = 0      # the code of signed integers
    DLPACK_CPU = 1
    DLPACK_CUDA_HOST = 3
    DLPACK_ROCM_HOST = 11
    MOST_DIMENSIONS = 2

cdef struct DLTensor:
    char* data
    int32_t device_type, device_index
    int32_t ndim
    uint8_t code, bits
    uint16_t lanes
    int64_t* shape
    int64_t* strides
    uint64_t byte_offset

ctypedef int (*read_tensor_t)(void* tensor, DLTensor* out) noexcept

cdef struct DLPackFunctions:
    uint32_t major, minor
    void* older
    void* allocate
    void* to_managed
    void* from_managed
    read_tensor_t read_tensor
    void* current_stream

cdef struct TensorFacts:
    char* data
    int32_t device_type, device_index, ndim
    uint8_t code, bits
    uint16_t lanes
    int64_t shape[MOST_DIMENSIONS]
    int64_t strides[MOST_DIMENSIONS]


cdef read_tensor_t tensor_reader(object capsule):
    """The function that reads a tensor; NULL where torch has none that is known here."""
    cdef DLPackFunctions* functions
    if capsule is None:
        return NULL
    functions = <DLPackFunctions*> PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    return functions.read_tensor if functions.major == DLPACK_MAJOR else NULL


cdef bint facts_of(read_tensor_t read, object tensor, TensorFacts* out):
    """The facts of a tensor of torch's own class; False where it has none, such as a sparse one."""
    cdef DLTensor found
    cdef int i
    if read(<void*> tensor, &found) != 0:
        PyErr_Clear()
        return False
    if found.ndim > MOST_DIMENSIONS:
        return False
    out.data, out.ndim = found.data + found.byte_offset, found.ndim
    out.device_type, out.device_index = found.device_type, found.device_index
    out.code, out.bits, out.lanes = found.code, found.bits, found.lanes
    for i in range(found.ndim):
        out.shape[i], out.strides[i] = found.shape[i], found.strides[i]
    return True


cdef bint same_facts(const TensorFacts* one, const TensorFacts* other) noexcept nogil:
    cdef int i
    if (one.data != other.data or one.ndim != other.ndim or one.device_type != other.device_type
            or one.device_index != other.device_index or one.code != other.code or one.bits != other.bits
            or one.lanes != other.lanes):
        return False
    for i in range(one.ndim):
        if one.shape[i] != other.shape[i] or one.strides[i] != other.strides[i]:
            return False
    return True


cdef bint is_host_int32(const TensorFacts* facts, slot_t count) noexcept nogil:
    """Whether it is int32[count] on the host, whose elements lie side by side where compiled code can read them."""
    return (
        (facts.device_type == DLPACK_CPU or facts.device_type == DLPACK_CUDA_HOST
         or facts.device_type == DLPACK_ROCM_HOST)
        and facts.ndim == 1 and facts.code == DLPACK_INT and facts.bits == 32 and facts.lanes == 1
        and facts.shape[0] == count and (count <= 1 or facts.strides[0] == 1)
        and <size_t> facts.data % sizeof(length_t) == 0
    )
