// The header in C++: linkage, and no C that C++ lacks.
#include <impress/impress.h>

#include "consumer.c"
