#include "store/filesystem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>

#include "base/status.h"

enum { FUSE = 0x65735546 };

/* f_type as linux/magic.h and statfs(2) name them. */
static const struct {
    uint64_t type;
    const char *name;
} refused[] = {
    {0x6969, "NFS"},           {0xff534d42, "CIFS"},  {0xfe534d42, "SMB"},    {0x517b, "SMB"},
    {0x01021997, "9p"},        {0x564c, "NCP"},       {0x5346414f, "AFS"},    {0x6b414653, "AFS"},
    {0x73757245, "Coda"},      {0x00c36400, "Ceph"},  {0x0bd00bd0, "Lustre"}, {0x47504653, "GPFS"},
    {0x19830326, "BeeGFS"},    {0x7461636f, "OCFS2"}, {0x01161970, "GFS2"},   {0x20030528, "OrangeFS"},
    {0xaad7aaea, "PanFS"},     {0xbeefdead, "SNFS"},  {0x013111a8, "IBRIX"},  {0x61636673, "ACFS"},
    {0x7c7c6673, "Parallels' shared folders"},
    {0x786f4256, "VirtualBox's shared folders"},
    {0xbacbacbc, "VMware's shared folders"},
};

/* What is mounted through FUSE and lies on a local disk all the same. */
static const char *const local_fuse[] = {"fuseblk", "fuse.fuse-overlayfs", "fuse.ext2", "fuse.ext4", "fuse.ntfs-3g"};

const char *imp_fs_refused(uint64_t type, const char *mounted)
{
    type &= 0xffffffffu; /* it is signed on some machines */
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        if (refused[i].type == type) return refused[i].name;
    }
    if (type != FUSE) return NULL;
    for (size_t i = 0; mounted && i < sizeof local_fuse / sizeof local_fuse[0]; i++) {
        if (strcmp(local_fuse[i], mounted) == 0) return NULL;
    }
    return "FUSE";
}

/* "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue": no field holds a blank. */
bool imp_fs_mounted(const char *mountinfo, dev_t device, char *out, size_t n_bytes)
{
    bool found = false;
    for (const char *line = mountinfo; line && *line; line = strchr(line, '\n')) {
        unsigned major_number, minor_number;
        if (*line == '\n') line++;
        const char *end = strchr(line, '\n'), *type = strstr(line, " - ");
        if (!type || (end && type > end)) continue;
        if (sscanf(line, "%*u %*u %u:%u", &major_number, &minor_number) != 2) continue;
        if (major_number != major(device) || minor_number != minor(device)) continue;
        type += 3;
        size_t n = strcspn(type, " \n");
        if (n >= n_bytes) continue;
        memcpy(out, type, n);
        out[n] = '\0';
        found = true; /* of several the last one is on top */
    }
    return found;
}

static bool mounted_as(int dir_fd, char *out, size_t n_bytes)
{
    static const char path[] = "/proc/self/mountinfo";
    struct stat st;
    char line[4096];
    bool found = false;
    FILE *f = fstat(dir_fd, &st) == 0 ? fopen(path, "re") : NULL;
    while (f && fgets(line, sizeof line, f)) {
        if (imp_fs_mounted(line, st.st_dev, out, n_bytes)) found = true;
    }
    if (f) fclose(f);
    return found;
}

int imp_fs_check(int dir_fd, const char *dir)
{
    struct statfs fs;
    char name[64];
    const char *allowed = getenv("IMPRESS_ANY_FS");
    if (allowed && strcmp(allowed, "1") == 0) return 0;
    if (fstatfs(dir_fd, &fs) != 0) return 0; /* what is wrong with it will show */
    bool known = (uint64_t)fs.f_type == FUSE && mounted_as(dir_fd, name, sizeof name);
    const char *what = imp_fs_refused((uint64_t)fs.f_type, known ? name : NULL);
    if (!what) return 0;
    return imp_fail(IMP_E_UNSUPPORTED,
                    "%s lies on %s%s%s, where a store's locks don't hold: put it on a local disk (IMPRESS_ANY_FS=1 opens "
                    "it all the same)",
                    dir, what, known ? ", as " : "", known ? name : "");
}
