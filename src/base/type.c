#include "impress/impress.h"

size_t imp_type_bytes(imp_type type, size_t n)
{
    size_t block, block_bytes;
    switch (type) {
    case IMP_TYPE_F32: block = 1, block_bytes = 4; break;
    case IMP_TYPE_F16:
    case IMP_TYPE_BF16: block = 1, block_bytes = 2; break;
    case IMP_TYPE_Q8_0: block = 32, block_bytes = 34; break;
    default: return 0;
    }
    if (n % block != 0 || n / block > SIZE_MAX / block_bytes) return 0;
    return n / block * block_bytes;
}
