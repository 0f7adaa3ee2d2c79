#!/usr/bin/env bash
# What systemd thinks of the unit, and whether the image installs every library that the program needs.
. "$(dirname "$0")/lib.sh"
packaging=../../packaging

# Each setting that the unit and the image name is one of serve's.
"$IMPRESS" serve --help >"$tmp/help" || fail "serve --help"
for variable in $(grep -ohE 'IMPRESS_[A-Z_]+' $packaging/*); do
    option=$(sed 's/^IMPRESS_//; y/ABCDEFGHIJKLMNOPQRSTUVWXYZ_/abcdefghijklmnopqrstuvwxyz-/' <<<"$variable")
    grep -qE -- "--$option |\\\$$variable" "$tmp/help" || fail "$variable is no setting of serve"
done

if command -v systemd-analyze >/dev/null; then
    sed "s#/usr/local/bin/impress#$(realpath "$IMPRESS")#" $packaging/impress.service >"$tmp/impress.service"
    systemd-analyze verify --man=no "$tmp/impress.service" >"$tmp/out" 2>&1 || fail "systemd-analyze: $(cat "$tmp/out")"
    grep -v '^$' "$tmp/out" | grep -q impress && fail "systemd-analyze: $(cat "$tmp/out")"
    if systemd-analyze security --help 2>&1 | grep -q -- --offline; then
        systemd-analyze security --offline=true --threshold=20 --no-pager "$tmp/impress.service" >"$tmp/out" 2>&1 ||
            fail "the unit is more exposed than it need be: $(tail -1 "$tmp/out")"
    fi
else
    echo "left out: no systemd-analyze"
fi

# Debian's names, so only there.
if command -v dpkg >/dev/null && grep -q '^VERSION_CODENAME=bookworm' /etc/os-release; then
    named=$(sed -n '/install -y --no-install-recommends/,/rm -rf/p' $packaging/Containerfile | grep -oE 'lib[a-z0-9.+-]+')
    # what these bring along, too
    # shellcheck disable=SC2086
    apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances $named \
        2>/dev/null | grep -v '^ ' >"$tmp/packages"
    for library in $(ldd "$IMPRESS" | awk '$3 ~ /^\/(usr\/)?lib\// { print $3 }'); do
        package=$(dpkg -S "$library" "/usr$library" "$(realpath "$library")" 2>/dev/null | head -1 | cut -d: -f1)
        [ -z "$package" ] || grep -qx -- "$package" "$tmp/packages" || fail "the image lacks $package ($library)"
    done
fi
finish
