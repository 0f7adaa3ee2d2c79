/* filesystem.h: where a store may lie. The catalogue is SQLite's in WAL mode: its processes share memory through a
 * mapped file and lock byte ranges of it, and live/ and lock are held by flock. A network's file system keeps neither promise
 * between machines, and some not even on one. So what isn't local is refused. */
#ifndef IMP_STORE_FILESYSTEM_H
#define IMP_STORE_FILESYSTEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* NULL: good; else what it is, in a word or two, for the line that refuses it. `type`: statfs's f_type. `mounted`: the
 * type as in /proc/self/mountinfo ("ext4", "fuse.sshfs"), which tells FUSE's file systems apart; NULL: not known. */
const char *imp_fs_refused(uint64_t type, const char *mounted);

/* The type of the file system with this device number, from the text of /proc/self/mountinfo. False: it isn't there. */
bool imp_fs_mounted(const char *mountinfo, dev_t device, char *out, size_t n_bytes);

/* 0, or IMP_E_UNSUPPORTED with a line: the directory lies where a store isn't safe. IMPRESS_ANY_FS=1 in the environment
 * lets it pass. */
int imp_fs_check(int dir_fd, const char *dir);

#endif
