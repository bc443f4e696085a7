-- Bounds: what JSON and times may be, on each path into the database.
--
-- jsonb keeps numbers as numeric, in which 1e131071 takes a dozen bytes. Its text has 131,072 characters, and a document of
-- such numbers that is small as jsonb can be larger as text than PostgreSQL can make a text. A client that reads the document reads
-- the text. So two things are bounded beside the size of the jsonb: the size of the text, and numbers, which have to be such
-- that a double can hold them. Whole numbers may have as many digits as that allows.
--
-- The test that every payload goes through has to cost little: what is small as jsonb is large as text only by numbers that
-- have many zeros in a row, and a search for 64 characters in a row looks at one character in 64.
--
-- And what one call may ask for is bounded: the elements of each array (check_size) and each limit (check_limit) of every function
-- that a role may call. tests/postgres/test_call_bounds.py finds them in the catalogue.

create or replace function penstock.problem_of(p_data jsonb, p_largest integer default 1048576)
returns text
language plpgsql
immutable
as $$
declare
    beyond constant jsonpath := '$.** ? (@.type() == "number" && (
        @ > 1.7976931348623157e308 || @ < -1.7976931348623157e308 || (@ < 4.9e-324 && @ > -4.9e-324 && @ != 0)
    ))';
begin
    if pg_column_size(p_data) > p_largest then
        return format('is larger than %s', case p_largest when 1048576 then '1 MiB' else p_largest / 1024 || ' KiB' end);
    end if;
    if jsonb_path_exists(p_data, beyond) then
        return 'has a number that no double can hold';
    end if;
    if octet_length(p_data::text) > p_largest * 2 then
        return format('is larger than %s as text', case p_largest when 1048576 then '2 MiB' else p_largest / 512 || ' KiB' end);
    end if;
    return null;
exception
    when program_limit_exceeded then
        return 'is larger than 1 GiB as text';
end
$$;
comment on function penstock.problem_of(jsonb, integer) is
    'What is wrong with a document: its size, the size of its text (twice p_largest at most), or a number in it. Null: nothing.';

create or replace function penstock.refuse(p_what text, p_problem text)
returns void
language plpgsql
immutable
as $$
begin
    if p_problem like '%number%' then
        raise exception '% %', p_what, p_problem
            using errcode = 'PS400', hint = 'Numbers are at most 1.8e308, and 0 or at least 4.9e-324, apart from the sign. Write others as text.';
    end if;
    raise exception '% %', p_what, p_problem
        using errcode = 'PS413', hint = 'Store large things elsewhere and give a reference.';
end
$$;
comment on function penstock.refuse(text, text) is 'Raises what problem_of found: PS400 for a number, PS413 for a size.';

create or replace function penstock.check_json(p_data jsonb, p_what text, p_largest integer default 1048576)
returns void
language plpgsql
immutable
as $$
declare
    problem constant text := penstock.problem_of(p_data, p_largest);
begin
    if problem is not null then
        perform penstock.refuse(p_what, problem);
    end if;
end
$$;
comment on function penstock.check_json(jsonb, text, integer) is
    'Raises PS400 or PS413 for a document that is too large, also as text, or has a number that no double can hold. p_what: what it is, for the message.';

create or replace function penstock.is_odd(p_data jsonb)
returns boolean
language sql
stable
parallel safe
as $$
    -- Without a statement of its own in it, so that it becomes a part of the condition in which it stands.
    select pg_column_size(p_data) > 16384
        or strpos(p_data::text, '0000000000000000000000000000000000000000000000000000000000000000') > 0
$$;
comment on function penstock.is_odd(jsonb) is
    'Whether problem_of can find something wrong with a document, which costs more: a small one has a small text unless it has many zeros in a row.';

create or replace function penstock.first_problem(p_data jsonb[], p_largest integer default 1048576)
returns integer
language plpgsql
immutable
as $$
declare
    place integer;
begin
    if not exists (
        select
        from unnest(p_data) as document
        where pg_column_size(document) > least(p_largest, 16384)
            or strpos(document::text, '0000000000000000000000000000000000000000000000000000000000000000') > 0
    ) then
        return null;
    end if;
    select min(given.place) into place
    from unnest(p_data) with ordinality as given (document, place)
    where penstock.problem_of(given.document, p_largest) is not null;
    return place;
exception
    when program_limit_exceeded then
        select min(given.place) into place
        from unnest(p_data) with ordinality as given (document, place)
        where penstock.problem_of(given.document, p_largest) is not null;
        return place;
end
$$;
comment on function penstock.first_problem(jsonb[], integer) is 'The place of the first document with which something is wrong, see problem_of. Null: nothing is.';

create or replace function penstock.check_each_json(p_data jsonb[], p_what text, p_largest integer default 1048576)
returns void
language plpgsql
immutable
as $$
declare
    place constant integer := penstock.first_problem(p_data, p_largest);
begin
    if place is not null then
        perform penstock.refuse(p_what, penstock.problem_of(p_data[place], p_largest));
    end if;
end
$$;
comment on function penstock.check_each_json(jsonb[], text, integer) is 'check_json for many.';

create or replace function penstock.is_key(p_key text)
returns boolean
language sql
immutable
parallel safe
as $$
    -- Not as one expression: '^[^[:cntrl:]]{1,255}$' takes thirty times as long, since its bound becomes hundreds of states.
    select length(p_key) between 1 and 255 and p_key !~ '[[:cntrl:]]'
$$;
comment on function penstock.is_key(text) is
    'Whether a text can be a key or a unique key: 1 to 255 characters without control characters. Null for null.';

create or replace function penstock.check_size(p_size bigint, p_most bigint, p_what text)
returns void
language plpgsql
immutable
as $$
begin
    if p_size > p_most then
        raise exception '% % are too many for one call', to_char(p_size, 'FM999,999,999,999'), p_what
            using errcode = 'PS413', hint = format('Give at most %s %s in one call.', to_char(p_most, 'FM999,999,999,999'), p_what);
    end if;
end
$$;
comment on function penstock.check_size(bigint, bigint, text) is
    'Raises PS413 when an array of this size (null: no array) has more elements than one call may bring. p_what: what they are, for the message.';

create or replace function penstock.check_lists(p_shapes text[])
returns void
language plpgsql
immutable
as $$
declare
    shape text;
begin
    foreach shape in array p_shapes loop
        if shape not like '[1:%' or shape like '%][%' then
            raise exception 'an array has the dimensions %', left(shape, 100)
                using errcode = 'PS400', hint = 'Give arrays with one dimension, whose first element has the number 1.';
        end if;
    end loop;
end
$$;
comment on function penstock.check_lists(text[]) is
    'Raises PS400 unless all arrays with these dimensions (array_dims; null: no array, or an empty one) are plain lists, so that the elements at one place belong together.';

create or replace function penstock.check_limit(p_limit bigint, p_most bigint, p_what text default 'limit')
returns void
language plpgsql
immutable
as $$
begin
    if p_limit is null or p_limit not between 1 and p_most then
        raise exception 'invalid %: %', p_what, coalesce(p_limit::text, 'null')
            using errcode = 'PS400', hint = format('Give a %s between 1 and %s.', p_what, to_char(p_most, 'FM9,999,999,999,999,999,999'));
    end if;
end
$$;
comment on function penstock.check_limit(bigint, bigint, text) is
    'Raises PS400 unless a limit is between 1 and p_most. p_what: what it is, for the message.';

create or replace function penstock.check_span(p_span interval, p_what text, p_least interval, p_most interval)
returns void
language plpgsql
immutable
as $$
begin
    if p_span is null or p_span not between p_least and p_most then
        raise exception 'invalid %: %', p_what, coalesce(p_span::text, 'null')
            using errcode = 'PS400', hint = format('Give a span of time between %s and %s.', p_least, p_most);
    end if;
end
$$;
comment on function penstock.check_span(interval, text, interval, interval) is
    'Raises PS400 unless a span of time is between p_least and p_most. p_what: what it is, for the message.';

create or replace function penstock.check_times(p_times timestamptz[])
returns void
language plpgsql
immutable
as $$
declare
    wrong timestamptz;
begin
    select given into wrong from unnest(p_times) as given where given <> penstock.shown_time(given) limit 1;
    if wrong is not null then
        raise exception 'a time is out of range: %', wrong
            using errcode = 'PS400', hint = 'Times lie in the years 1 to 9999, infinity does not; leave one out that is to be now, or never.';
    end if;
end
$$;
comment on function penstock.check_times(timestamptz[]) is 'Raises PS400 unless these times are such that every client can read them.';

create or replace function penstock.zoned_time(p_text text, p_what text)
returns timestamptz
language plpgsql
stable
strict
as $$
begin
    -- Infinity is for check_times to refuse, which says why.
    if p_text !~ '^([0-9]{4,6}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]+)?)?(Z|[+-][0-9]{2}(:?[0-9]{2}){0,2})|[+-]?infinity)$' then
        raise exception '% %: %', p_what,
            case when p_text ~ '^[0-9]{4,6}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]+)?)?)?$' then 'has no time zone' else 'is not a time' end,
            left(p_text, 100)
            using errcode = 'PS400', hint = 'Write it with its zone, such as "2026-01-31T12:00:00Z" or "2026-01-31T13:00:00+01:00".';
    end if;
    return p_text::timestamptz;
end
$$;
comment on function penstock.zoned_time(text, text) is
    'A time that is written in a document, in ISO 8601 with its zone. Raises PS400 for one without a zone, which would be another time in each session, and for what is not a time. p_what: its name, for the message.';

create or replace function penstock.shown_time(p_time timestamptz)
returns timestamptz
language sql
immutable
parallel safe
as $$
    -- Written with their numbers of seconds, since a text would be read by the session's settings.
    select case when p_time is not null then greatest(least(p_time, to_timestamp(253402300799)), to_timestamp(-62135596800)) end
$$;
comment on function penstock.shown_time(timestamptz) is
    'A time that every client can read: what lies before the year 1 or after 9999 becomes the first or the last second of these.';

create or replace function penstock.shown(p_data jsonb)
returns text
language plpgsql
immutable
as $$
begin
    if octet_length(p_data::text) <= 4194304 then
        return p_data::text;
    end if;
    return null;
exception
    when program_limit_exceeded then
        return null;
end
$$;
comment on function penstock.shown(jsonb) is
    'The text of a document, or null when it has more than 4 MiB, which no path into the database admits.';

create or replace function penstock.note_large(p_name text)
returns void
language plpgsql
as $$
begin
    if not exists (select from penstock.large_payloads where name = p_name) then
        insert into penstock.large_payloads (name) values (p_name);
    end if;
end
$$;
comment on function penstock.note_large(text) is 'Part of the calls that enqueue and publish: notes that a job type, or a topic, has payloads that a claim has to weigh.';

-- PostgreSQL stores json that it cannot read: with \u0000, which no text can have, or half of a surrogate pair; and the text of what is
-- staged may be anything. What looks into such documents reads them with the following functions, so that one document stops nothing.

create or replace function penstock.readable_text(p_document text)
returns text
language sql
immutable
as $$
    -- An escaped backslash first, in another notation: then each backslash that is left begins an escape. (What a backslash means in a
    -- constant is a setting of the caller: ~ stands for it.)
    select case
        when strpos(p_document, translate('~u', '~', chr(92))) = 0 then p_document
        else regexp_replace(
            regexp_replace(
                replace(
                    replace(p_document, translate('~~', '~', chr(92)), translate('~u005c', '~', chr(92))),
                    translate('~u0000', '~', chr(92)), translate('~ufffd', '~', chr(92))
                ),
                translate('~~u[dD][89abAB][[:xdigit:]]{2}(?!~~u[dD][c-fC-F][[:xdigit:]]{2})', '~', chr(92)), translate('~~ufffd', '~', chr(92)), 'g'
            ),
            translate('(?<!~~u[dD][89abAB][[:xdigit:]]{2})~~u[dD][c-fC-F][[:xdigit:]]{2}', '~', chr(92)), translate('~~ufffd', '~', chr(92)), 'g'
        )
    end
$$;
comment on function penstock.readable_text(text) is
    'The text of a JSON document with U+FFFD in the place of U+0000 and of halves of surrogate pairs, which PostgreSQL stores as json and cannot read.';

create or replace function penstock.readable_json(p_document text)
returns jsonb
language plpgsql
immutable
as $$
begin
    return penstock.readable_text(p_document)::jsonb;
exception
    when data_exception or program_limit_exceeded then
        return null;
end
$$;
comment on function penstock.readable_json(text) is
    'A document as jsonb, as far as PostgreSQL can read it (see readable_text); null when it is no JSON, or has a number that jsonb cannot hold.';

create or replace function penstock.field_of_json(p_document json, p_path text[])
returns text
language plpgsql
immutable
as $$
begin
    -- Not as jsonb: a document that also has a number which jsonb cannot hold has its other fields.
    return penstock.readable_text(p_document::text)::json #>> p_path;
exception
    when data_exception or program_limit_exceeded then
        return null;
end
$$;
comment on function penstock.field_of_json(json, text[]) is 'A field of a document as text, as far as PostgreSQL can read it (see readable_text); null when there is none.';
