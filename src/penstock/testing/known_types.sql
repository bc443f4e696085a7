-- The names of job types, to tell one without jobs from a misspelt one: the wanted one, or if it does not exist, all.
select type.name
from penstock.jobs as type
where
    cast({1} as text) = 'all'
    and (type.name = {0} or not exists (select from penstock.jobs as wanted where wanted.name = {0}))
order by type.name
limit 10000
