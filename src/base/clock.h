/* clock.h: monotonic nanoseconds for durations, wall seconds for records. */
#ifndef IMP_BASE_CLOCK_H
#define IMP_BASE_CLOCK_H

#include <stdint.h>

uint64_t imp_now_ns(void);
int64_t imp_wall_s(void);

#endif
