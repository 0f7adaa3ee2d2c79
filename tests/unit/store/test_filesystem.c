/* Which file systems a store is opened on. */
#include <errno.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cmocka.h>

#include "store/filesystem.h"
#include "support/store_world.h"
#include "support/support.h"

static void network_file_systems_are_refused(void **state)
{
    (void)state;
    static const uint64_t local[] = {0xef53 /* ext4 */,    0x01021994 /* tmpfs */, 0x794c7630 /* overlayfs */,
                                     0x58465342 /* xfs */, 0x9123683e /* btrfs */, 0x2fc12fc1 /* zfs */,
                                     0xf2f52010 /* f2fs */, 0x858458f6 /* ramfs */, 0x4d44 /* vfat */, 0};
    for (size_t i = 0; i < sizeof local / sizeof local[0]; i++) assert_null(imp_fs_refused(local[i], NULL));
    assert_string_equal(imp_fs_refused(0x6969, NULL), "NFS");
    assert_string_equal(imp_fs_refused(0x6969, "nfs4"), "NFS");
    assert_string_equal(imp_fs_refused(0xff534d42, NULL), "CIFS");
    assert_string_equal(imp_fs_refused(0xffffffffff534d42u, NULL), "CIFS");
    assert_string_equal(imp_fs_refused(0xfe534d42, "smb3"), "SMB");
    assert_string_equal(imp_fs_refused(0x01021997, NULL), "9p");
    assert_string_equal(imp_fs_refused(0x00c36400, "ceph"), "Ceph");
    assert_string_equal(imp_fs_refused(0x19830326, "beegfs"), "BeeGFS");
    assert_string_equal(imp_fs_refused(0x20030528, "pvfs2"), "OrangeFS");
    assert_string_equal(imp_fs_refused(0xffffffffaad7aaeau, NULL), "PanFS");
}

static void of_fuse_only_what_is_known(void **state)
{
    (void)state;
    assert_string_equal(imp_fs_refused(0x65735546, "fuse.sshfs"), "FUSE");
    assert_string_equal(imp_fs_refused(0x65735546, "virtiofs"), "FUSE");
    assert_string_equal(imp_fs_refused(0x65735546, NULL), "FUSE");
    assert_null(imp_fs_refused(0x65735546, "fuseblk"));
    assert_null(imp_fs_refused(0x65735546, "fuse.fuse-overlayfs"));
    assert_null(imp_fs_refused(0xef53, "fuse.sshfs")); /* the type that statfs gives is the surer one */
}

static void types_are_found_among_the_mounts(void **state)
{
    (void)state;
    static const char text[] = "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
                               "23 22 0:21 / /proc rw shared:5 - proc proc rw\n"
                               "24 22 0:55 / /home/a\\040b rw shared:6 master:1 - fuse.sshfs x:/y rw,user_id=0\n"
                               "garbage\n"
                               "25 22 0:56 / /data rw - nfs4 server:/data rw";
    char type[16];
    assert_true(imp_fs_mounted(text, makedev(254, 0), type, sizeof type));
    assert_string_equal(type, "ext4");
    assert_true(imp_fs_mounted(text, makedev(0, 55), type, sizeof type));
    assert_string_equal(type, "fuse.sshfs");
    assert_true(imp_fs_mounted(text, makedev(0, 56), type, sizeof type));
    assert_string_equal(type, "nfs4");
    assert_false(imp_fs_mounted(text, makedev(0, 57), type, sizeof type));
    assert_false(imp_fs_mounted("", makedev(0, 57), type, sizeof type));
    assert_false(imp_fs_mounted(text, makedev(254, 0), type, 4)); /* no room */
}

/* A store works there, with an odd last chunk, and says how it reads. */
static void works_on(const char *dir, const char *name)
{
    imp_world w;
    imp_stats st;
    int32_t tokens[77];
    for (int i = 0; i < 77; i++) tokens[i] = 3 * i;
    for (int turn = 0; turn < 2; turn++) {
        assert_int_equal(imp_world_open(&w, imp_test_path(dir, "store"), NULL, NULL), 0);
        if (turn == 0) {
            assert_int_equal(imp_world_commit(&w, tokens, 77, 0, 0, NULL), 0);
            assert_int_equal(imp_store_flush(w.store), 0);
        }
        assert_int_equal(imp_world_check(&w, tokens, 77, true), 77);
        assert_int_equal(imp_world_verify(&w, false, true), 0);
        assert_int_equal(imp_store_stats(w.store, &st), 0);
        assert_true(strstr(st.io_mode, "O_DIRECT") || strstr(st.io_mode, "page cache"));
        imp_world_close(&w);
    }
    fprintf(stderr, "%s: %s\n", name, st.io_mode);
}

static void works_in(const char *where, const char *name)
{
    char *dir = imp_test_make_dir(where);
    if (dir) works_on(dir, name);
    if (!dir) fprintf(stderr, "not tried: %s\n", name);
    imp_test_remove_dir(dir);
}

/* Only root may mount one; in a mount namespace of this process's own, it goes with the process at the latest. */
static void works_on_overlayfs(const char *where)
{
    char *dir = imp_test_make_dir(where), options[512];
    if (!dir) return;
    static const char *const folders[] = {"lower", "upper", "work", "merged"};
    for (size_t i = 0; i < 4; i++) assert_int_equal(mkdir(imp_test_path(dir, folders[i]), 0700), 0);
    snprintf(options, sizeof options, "lowerdir=%s/lower,upperdir=%s/upper,workdir=%s/work", dir, dir, dir);
    const char *merged = imp_test_path(dir, "merged");
    bool there = unshare(CLONE_NEWNS) == 0 && mount("none", "/", "none", MS_REC | MS_PRIVATE, NULL) == 0 &&
                 mount("overlay", merged, "overlay", 0, options) == 0;
    if (there) {
        works_on(merged, "overlayfs");
        assert_int_equal(umount(merged), 0);
    } else {
        fprintf(stderr, "not tried: overlayfs (%s)\n", strerror(errno));
    }
    imp_test_remove_dir(dir);
}

static void works_on_ext4_tmpfs_and_overlayfs(void **state)
{
    (void)state;
    works_in(NULL, "the folder for temporary files");
    works_in("/dev/shm", "tmpfs");
    works_on_overlayfs(NULL);
    works_on_overlayfs("/dev/shm");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(network_file_systems_are_refused),
        cmocka_unit_test(of_fuse_only_what_is_known),
        cmocka_unit_test(types_are_found_among_the_mounts),
        cmocka_unit_test(works_on_ext4_tmpfs_and_overlayfs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
