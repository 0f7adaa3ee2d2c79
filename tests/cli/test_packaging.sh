#!/usr/bin/env bash
# What systemd thinks of the unit; whether the image's commands can be read, and its second stage holds what the program
# needs: its libraries alone, in a root of their own, serve a request as the image's user.
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

# The image's commands, as a shell reads them, and what they name.
sed -e ':a; /\\$/ { N; s/\\\n *//; ba }' $packaging/Containerfile | grep -E '^(RUN|ENV) ' >"$tmp/image"
[ "$(grep -c '^RUN' "$tmp/image")" -eq 2 ] || fail "the image has other commands than this test knows"
while IFS= read -r line; do
    sh -n -c "$line" || fail "not for a shell: $line"
    for script in $(grep -oE 'scripts/[a-z-]+\.sh' <<<"$line"); do [ -x "../../$script" ] || fail "no $script"; done
done < <(sed -n 's/^RUN //p' "$tmp/image")

# Debian's names, so only there; and an image isn't made of a program with a sanitizer, whose libraries it lacks.
if ldd "$IMPRESS" | grep -qE 'lib(asan|ubsan|tsan)\.'; then
    echo "left out: the image's libraries (the program is built with a sanitizer)"
elif command -v dpkg >/dev/null && grep -q '^VERSION_CODENAME=bookworm' /etc/os-release; then
    named=$(sed -n '/install -y --no-install-recommends/,/rm -rf/p' $packaging/Containerfile | grep -oE 'lib[a-z0-9.+-]+')
    # what these bring along, too
    # shellcheck disable=SC2086
    apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances $named \
        2>/dev/null | grep -v '^ ' >"$tmp/packages"
    for library in $(ldd "$IMPRESS" | awk '$3 ~ /^\/(usr\/)?lib\// { print $3 }'); do
        package=$(dpkg -S "$library" "/usr$library" "$(realpath "$library")" 2>/dev/null | head -1 | cut -d: -f1)
        [ -z "$package" ] || grep -qx -- "$package" "$tmp/packages" || fail "the image lacks $package ($library)"
    done

    # Those packages' libraries, llama.cpp's and the program, as the image has them.
    if [ "$(id -u)" -eq 0 ] && [ -r "${IMPRESS_MODEL:-}" ] && command -v curl >/dev/null && chroot / true &&
        mkdir -p "$tmp/root/dev" && mknod -m 666 "$tmp/root/dev/null" c 1 3 && : >"$tmp/root/dev/null"; then
        root=$tmp/root
        mkdir -p "$root/usr/local/bin" "$root/usr/local/lib/impress"
        install -d "$root/var/lib"
        install -d -o 10001 -m 700 "$root/var/lib/impress"
        # shellcheck disable=SC2046
        dpkg -L $(cat "$tmp/packages") 2>/dev/null | grep -E '\.so(\.|$)' | sort -u | sed 's#^/##' >"$tmp/libraries"
        tar -C / --ignore-failed-read -cf - -T "$tmp/libraries" 2>/dev/null | tar -C "$root" -xf - || fail "copying the libraries"
        chmod -R a+rX "$root"/usr "$root"/lib*
        cp "$IMPRESS" "$root/usr/local/bin/impress"
        ldd "$IMPRESS" | awk '/lib(llama|ggml|mtmd)[^ ]* => \// { print $3 }' | xargs -I{} cp -L {} "$root/usr/local/lib/impress/"
        cp "$IMPRESS_MODEL" "$root/model.gguf"
        chmod 755 "$tmp" "$root"
        chmod 644 "$root/model.gguf"
        # shellcheck disable=SC2207
        settings=($(sed -n 's/^ENV //p' "$tmp/image") LD_LIBRARY_PATH=/usr/local/lib/impress IMPRESS_PORT=0 IMPRESS_CTX_SIZE=256)
        image=("$(command -v chroot)" --userspec=10001:10001 "$root" /usr/local/bin/impress)
        [ "$(env -i "${settings[@]}" "${image[@]}" --version)" = "$("$IMPRESS" --version)" ] ||
            fail "the program doesn't run in the image's root"
        env -i "${settings[@]}" "${image[@]}" serve -m /model.gguf >"$tmp/out" 2>&1 && fail "the image serves everybody"
        grep -q 'without API keys' "$tmp/out" || fail "the image without a key: $(cat "$tmp/out")"
        env -i "${settings[@]}" IMPRESS_API_KEY=key-of-the-image "${image[@]}" serve -m /model.gguf 2>"$tmp/log" &
        server=$!
        for _ in $(seq 600); do
            port=$(sed -n 's/.*"event":"listening".*"port":\([0-9]*\).*/\1/p' "$tmp/log")
            [ -z "$port" ] && kill -0 $server 2>/dev/null || break
            sleep 0.1
        done
        curl -s -m 600 -H 'Authorization: Bearer key-of-the-image' "http://127.0.0.1:$port/v1/completions" \
            -d '{"prompt": "Hello", "max_tokens": 2}' >"$tmp/reply" || fail "the image's server: $(cat "$tmp/log")"
        json_ok "$tmp/reply" 'd["usage"]["completion_tokens"] == 2'
        kill -TERM $server
        wait $server || fail "the image's server ends with $?"
        [ -f "$root/var/lib/impress/store/catalogue.db" ] || fail "no store in the image's volume"
    else
        echo "left out: the image's root (needs root, devices, a model and curl)"
    fi
fi
finish
